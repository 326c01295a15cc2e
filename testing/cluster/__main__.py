"""`python -m testing.cluster <verb>`: the throwaway cluster from a shell."""

from __future__ import annotations

import sys

from testing.cluster.cli import main

sys.exit(main())
