"""Generation: decoding, sampling, the KV cache, rollouts in chunks."""
