from __future__ import annotations

import gc

import pytest

from ninfer.cli.starting import starting


def test_garbage_is_looked_for_again_once_a_model_is_there_but_not_in_what_it_is_made_of() -> None:
    with starting("cpu"):
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count()
    gc.unfreeze()


def test_a_load_that_fails_leaves_things_as_they_were() -> None:
    with pytest.raises(OSError), starting("cpu"):
        raise OSError
    assert gc.isenabled()
    gc.unfreeze()
