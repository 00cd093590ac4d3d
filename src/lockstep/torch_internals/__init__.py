"""Every private name of torch that Lockstep uses, one function each; no other package has any.

Each docstring says what it needs of torch, in which of the supported versions (2.9 to 2.13) that is there, and what
happens without it. Its test, at the mirrored path, runs on the tested torch and in ``make floor`` on the oldest.
"""
