"""Tests that a report reaches the parts that act on it, in their order."""

from __future__ import annotations

from unittest import mock

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.events import Events


def test_each_report_calls_its_functions_in_order_and_no_others() -> None:
    heard, job = mock.Mock(), Job("gpt")
    events = Events(
        on_saved=[heard.saved],
        on_settled=[heard.first, heard.second],
        on_claim_lost=[heard.lost],
        on_changed=[heard.changed],
    )
    events.claim_lost(job, 3)
    assert heard.mock_calls == [mock.call.lost(job, 3)]
    events.settled(job)  # a private daemon may have nothing left to do
    assert heard.mock_calls[1:] == [
        mock.call.first(job),
        mock.call.second(job),
        mock.call.changed(),
    ]


def test_a_remark_reaches_the_trainer_of_its_job() -> None:
    heard = mock.Mock()
    Events(on_remark=[heard.remark]).remark("gpt", "little room")
    assert heard.mock_calls == [mock.call.remark("gpt", "little room")]


def test_a_report_on_which_no_part_acts_is_lost() -> None:
    Events().settled(Job("gpt"))
