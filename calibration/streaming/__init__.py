"""A checkpoint run block by block: one decoder layer in memory, activations on disk."""
