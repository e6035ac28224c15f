"""Linear attention and the gated delta rule."""
