"""Lets the tests of this folder import the runs that they start and kill."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
