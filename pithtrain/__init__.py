"""pith: a compact trainer for Mixture-of-Experts language models."""
