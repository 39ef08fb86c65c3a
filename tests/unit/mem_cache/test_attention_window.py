import pytest

from mem_cache.attention_window import AttentionWindow
from tests.support.kv_caches import PAGE_SIZES
from tests.support.window_model import WindowModel

WINDOWS = (2, 3, 4, 5, 8, 15, 16, 17, 64, 100)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("tokens", WINDOWS)
def test_needs_the_pages_of_the_positions_that_are_read(page_size, tokens):
    window = AttentionWindow.of(tokens, page_size)
    model = WindowModel(page_size, tokens)
    for length in range(130):
        assert window.needed_from(length) == model.needed_from(length)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("tokens", WINDOWS)
def test_a_match_needs_a_page_at_least(page_size, tokens):
    window = AttentionWindow.of(tokens, page_size)
    assert all(window.needed_from(end) < end for end in range(page_size, 400, page_size))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("tokens", WINDOWS)
def test_slides_in_strides_and_holds_little_more_than_it_needs(page_size, tokens):
    window = AttentionWindow.of(tokens, page_size)
    start, slides = 0, 0
    for length in range(1000):
        slid = window.slid(start, length)
        assert slid == start or slid - start >= window.stride
        assert slid <= window.needed_from(length)
        assert length - slid <= tokens + window.stride + page_size
        slides += slid != start
        start = slid
    assert 0 < slides <= 1000 // window.stride


def test_the_stride_is_whole_pages_and_a_sixteenth_of_the_window_at_most():
    assert AttentionWindow.of(4096, 16).stride == 256
    assert AttentionWindow.of(4000, 16).stride == 240
    assert AttentionWindow.of(100, 16).stride == 16
    assert AttentionWindow.of(None, 64).stride == 64


def test_without_a_window_everything_is_read_for_ever():
    window = AttentionWindow.of(None, 4)
    assert window.needed_from(10_000) == 0
    assert window.slid(0, 10_000) == 0


def test_a_window_of_one_token_is_refused():
    with pytest.raises(AssertionError, match="a window of 1 tokens"):
        AttentionWindow.of(1, 4)
