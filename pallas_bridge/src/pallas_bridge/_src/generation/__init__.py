"""Text generation: decoders as Qwen 3, Qwen 2.5, Llama 3 and Mistral have them, and sampling."""
