"""Lets the tests of this folder use the ledger's event histories (`ledger_cases`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "ledger"))
