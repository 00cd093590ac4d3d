"""Mixed precision: where it applies, what comes out, and the loss scale of fp16."""
