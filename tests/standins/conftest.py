"""Makes the stand-ins importable here: they are no part of eagle3x."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
