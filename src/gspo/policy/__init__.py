"""The trained causal LM: loading, packed log-probs, saving."""
