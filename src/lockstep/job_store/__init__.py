"""The store that the processes of a job share: where it listens, and values that prove who wrote them."""
