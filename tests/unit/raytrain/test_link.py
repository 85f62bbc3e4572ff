"""The line between driver and rank 0, as a plain asyncio object."""

from __future__ import annotations

import asyncio

from raytrain.link import RunLink


def test_a_stop_ends_every_wait_and_stays_asked_for() -> None:
    async def story() -> None:
        link = RunLink()
        waits = [asyncio.create_task(link.wait_stop()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(wait.done() for wait in waits)
        await link.push({"phase": "training"})  # a long poll blocks nobody
        assert (await link.status())["phase"] == "training"
        await link.stop()
        assert await asyncio.gather(*waits) == [True, True] and await link.wait_stop() is True

    asyncio.run(story())


def test_progress_is_laid_over_what_was_known() -> None:
    async def story() -> None:
        link = RunLink()
        assert await link.status() == {}
        await link.push({"phase": "training", "step": 0})
        await link.push({"row": {"step": 3}})
        await link.push({"row": {"step": 4}})
        assert await link.status() == {"phase": "training", "step": 0, "row": {"step": 4}}

    asyncio.run(story())


def test_what_rank_zero_says_is_heard_once_and_in_order() -> None:
    async def story() -> None:
        link = RunLink()
        assert await link.heard() == ""
        for word in ("one ", "two\n"):
            await link.say(word)
        assert await link.heard() == "one two\n" and await link.heard() == ""

    asyncio.run(story())
