"""What is shown on a terminal when a job fails, and the same as plain text where there is none."""
