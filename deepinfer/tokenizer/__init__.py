"""Text to ids and back, chat encoding, stop strings, and the compressed vocabulary of the n-gram memory."""
