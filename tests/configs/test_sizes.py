import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstep.configs.sizes import MAX_BYTES, UNITS, format_bytes, parse_bytes
from tierstep.errors import ConfigError


@pytest.mark.parametrize(
    ("amount", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("64KiB", 65536),
        ("10GB", 10**10),
        ("10 gb", 10**10),
        ("3kB", 3000),
        ("2MB", 2_000_000),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        (" 7 ", 7),
        ("3B", 3),
        ("0.3KiB", 307),
        (4096, 4096),
        (0, 0),
        ("0GiB", 0),
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_amounts_mean_what_people_mean(amount, nbytes):
    assert parse_bytes(amount) == nbytes


@pytest.mark.parametrize(
    ("amount", "remedy"),
    [
        (-1, "write 0"),
        ("-2GiB", "write 0"),
        (MAX_BYTES + 1, "is the unit right"),
        ("9999999TiB", "is the unit right"),
        ("9" * 5000, "sensible"),
        (True, "write an integer"),
        (False, "write an integer"),
        (None, "write an integer"),
        (1.5, "write an integer"),
        (float("nan"), "write an integer"),
        (float("inf"), "write an integer"),
        ("nan", "write an integer"),
        ("", "write an integer"),
        ("GiB", "write an integer"),
        ("1e9", "write an integer"),
        ("1.GiB", "write an integer"),
        ("٣GiB", "write an integer"),
        ("8G", "use one of"),
        ("8GiX", "use one of"),
        (b"8GiB", "write an integer"),
    ],
)
def test_a_wrong_amount_is_refused_with_its_value_and_the_remedy(amount, remedy):
    with pytest.raises(ConfigError) as refusal:
        parse_bytes(amount)
    assert repr(amount) in str(refusal.value)
    assert remedy in str(refusal.value)


@given(st.integers(0, 1023), st.sampled_from([unit for unit in UNITS if "i" in unit or unit == "B"]))
def test_what_was_formatted_parses_to_the_same_amount(number, unit):
    nbytes = number * UNITS[unit]
    assert parse_bytes(format_bytes(nbytes)) == nbytes


@given(st.integers(0, MAX_BYTES))
def test_formatting_rounds_to_two_decimals_of_the_unit(nbytes):
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= 0.005 * nbytes + 1


@given(st.decimals(0, 1000, places=3), st.sampled_from(list(UNITS)))
def test_decimal_amounts_are_exact_to_the_byte(number, unit):
    assert parse_bytes(f"{number}{unit}") == int(number * UNITS[unit])


def test_formatted_amounts_read_well():
    assert [format_bytes(n) for n in (0, 1023, 1536, 64 * 2**20, 10**10)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "64 MiB",
        "9.31 GiB",
    ]
