"""Before anything loads torch: its idle threads must not spin on cores that other tests' processes need."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
