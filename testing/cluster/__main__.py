"""Run the throwaway cluster from a shell: `python -m testing.cluster COMMAND`."""

from __future__ import annotations

import sys

from testing.cluster.cli import main

sys.exit(main())
