"""Settings and formulas of the package. A standalone folder has the text of these modules here (files/model_code.py)."""

# ruff: noqa: F403
from interdomain.features.plain import *
from interdomain.model.feature_maps import *
from interdomain.model.mixers.fixed_state_scan import *
from interdomain.model.recomputation import *
from interdomain.model.settings import *
from interdomain.scan.step import *
from interdomain.scan.tables import *
