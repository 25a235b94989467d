"""Before anything else is imported: what has to be known when it is."""

import os

# Idle threads of torch must not spin on cores that other tests' processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Triton decides for good, when it is first imported, whether kernels are compiled or interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
