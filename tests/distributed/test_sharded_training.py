"""Any mesh trains like one rank: the first gradient, its norm, losses, weights and tables."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.corpus import load_corpus
from data.loader import batches
from tests.builders import trainer_config
from tests.ranks import Ranks as Pool
from trainer.config import ParallelConfig, TrainerConfig
from trainer.learner import build_learner
from trainer.loop import train
from trainer.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
