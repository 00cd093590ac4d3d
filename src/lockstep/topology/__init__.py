"""Who am I, and with whom: this process's place in the job and its line to the others."""
