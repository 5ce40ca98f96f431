"""Speculative decoding: how drafts are drawn, which are verified, and which stand. No model and no engine in here."""
