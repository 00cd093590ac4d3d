"""Starting jobs: nothing here is imported by the processes of a job, except ``worker``, which runs them."""
