"""`python -m tetherl`: the same as `tetherl`."""

from tetherl.cli import main

raise SystemExit(main())
