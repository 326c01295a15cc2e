"""`python -m cluster <verb>`: the throwaway cluster from a shell."""

from __future__ import annotations

import sys

from cluster.cli import main

sys.exit(main())
