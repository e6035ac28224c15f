"""How it is done; what users may rely on is in `pallas_bridge` itself."""
