from __future__ import annotations

from kvferry.config import settings
from kvferry.setting_texts import setting_texts


def test_every_setting_has_a_text_of_one_line():
    texts = setting_texts()
    assert texts.keys() == dict(settings()).keys()
    assert all(text and text == " ".join(text.split()) for text in texts.values())


def test_the_text_is_that_below_the_field():
    texts = setting_texts()
    assert texts["cache.host.memory_bytes"] == "Per worker. 0: no host tier."
    assert texts["workers.both.threads"].startswith("Compute threads per worker.")
