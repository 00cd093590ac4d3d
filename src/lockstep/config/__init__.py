"""What was asked for: values, where they came from, and whether they can be honoured."""
