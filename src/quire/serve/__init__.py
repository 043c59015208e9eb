"""The OpenAI-compatible HTTP server. It holds no model: it turns bodies into requests of the engine and back."""
