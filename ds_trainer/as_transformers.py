"""``import ds_trainer.as_transformers``: this process uses this package's Trainer wherever code uses transformers'.

Make it the first import of a script or notebook. ``ds-trainer run SCRIPT`` does the same without a change to the
script.

Raises:
    ConfigError: code imported before has already subclassed transformers' Trainer or its arguments.
"""

from __future__ import annotations

from ds_trainer.compatibility.replacement import replace_transformers

replace_transformers()
