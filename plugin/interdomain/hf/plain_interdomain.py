"""The formulas in plain PyTorch. In a standalone folder this file holds the text of these modules (files/model_code.py)."""

# ruff: noqa: F403
from interdomain.features.plain import *
from interdomain.model.feature_maps import *
from interdomain.model.mixers.fixed_state_scan import *
from interdomain.scan.chunkwise import *
from interdomain.scan.step import *
from interdomain.scan.tables import *
