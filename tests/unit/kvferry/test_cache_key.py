from itertools import product

from kvferry.cache_key import build_extra_key

PARTS = ("", "a", "b", "ab", "a/b", "/", ",", '"', 'a","b', "[]", "null", "\u00e4", "\\u00e4", "\n")


def test_each_part_counts_and_no_parts_join_into_others():
    """Whatever models, adapters and tenants are called, none reads another's KV."""
    keys = {build_extra_key(*parts) for parts in product(PARTS, repeat=3)}
    assert len(keys) == len(PARTS) ** 3


def test_a_key_is_a_function_of_its_parts():
    assert build_extra_key("m") == build_extra_key("m", "", "") == '["m","",""]'
