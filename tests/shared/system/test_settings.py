"""Tests that the names of variables are those of the daemon's settings, and that
misspelled ones are named.
"""

from __future__ import annotations

from ckptd.daemon.config import FIELDS
from ckptd.shared.system.settings import NOT_OF_THE_DAEMON, SETTINGS, nearest, unknown


def test_the_names_are_those_of_the_daemon() -> None:
    assert set(FIELDS) == SETTINGS
    assert not SETTINGS & NOT_OF_THE_DAEMON


def test_a_variable_that_means_nothing_is_named_with_the_nearest() -> None:
    environment = {
        "CKPTD_SHM_QUOTTA": "1",
        "CKPTD_JOBB": "x",
        "CKPTD_ZZZZZZZZZ": "1",
        "CKPTD_ROOT": "/r",
        "CKPTD_TAKEOVER": "1",
        "PATH": "/",
        "CKPTD": "",
    }
    assert unknown(environment) == {
        "CKPTD_JOBB": "CKPTD_JOB",
        "CKPTD_SHM_QUOTTA": "CKPTD_SHM_QUOTA",
        "CKPTD_ZZZZZZZZZ": "",
    }
    assert nearest("rot", SETTINGS) == "root"
