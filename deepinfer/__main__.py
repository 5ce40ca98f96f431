"""``python -m deepinfer`` is the ``deepinfer`` command."""

import sys

from deepinfer.entrypoints.cli import main

sys.exit(main())
