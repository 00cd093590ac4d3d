"""``python -m lockstep`` is the ``lockstep`` command."""

from lockstep.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
