"""What runs in the ranks of a job to find out how they talk to each other. It starts nothing: a launcher has."""
