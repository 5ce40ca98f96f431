"""Tells a right engine from a nearly right one: tasks with checkable answers, perplexity, acceptance of drafts."""
