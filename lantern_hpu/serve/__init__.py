"""A server of images: slots of captured engines behind OpenAI's images endpoint."""
