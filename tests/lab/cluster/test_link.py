"""Rates as users write them."""

import pytest

from thinwire_lab.cluster.link import Rate, interface_bytes, parse_rate
from thinwire_lab.inputs import BadInput


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 100_000_000),
        ("1gbit", 1_000_000_000),
        ("1.5gbit", 1_500_000_000),
        ("300kbit", 300_000),
        ("2.5mbps", 2_500_000),
        ("100Mbps", 100_000_000),
        (" 100 Mbit/s ", 100_000_000),
        ("10MBIT", 10_000_000),
        ("10 Mb/s", 10_000_000),
        ("8kbit", 8_000),
        ("0.008mbit", 8_000),
        ("32gbit", 32_000_000_000),
    ],
)
def test_rates(text: str, bits: int) -> None:
    assert parse_rate(text) == Rate(bits)


@pytest.mark.parametrize(
    ("text", "latency"), [("10mbit/50ms", 0.05), ("10 Mbit/s / 300us", 3e-4), ("10mbit/5s", 5.0), ("10mbit/0ms", 0.0)]
)
def test_latencies(text: str, latency: float) -> None:
    assert parse_rate(text) == Rate(10_000_000, latency)
    assert str(Rate(10_000_000, 0.05)) == "10 Mbit/s and 50 ms"


@pytest.mark.parametrize("text", ["none", "None", " NONE "])
def test_no_limit(text: str) -> None:
    assert parse_rate(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "fast",
            "100",
            "mbit",
            "1e3mbit",
            "1,5gbit",
            "1..5mbit",
            ".5mbit",
            "5.mbit",
            "100mbit 5",
            "5tbit",
            "٣mbit",
        ),
        *("10mbit/", "10mbit/50", "10mbit/6s", "10mbit/-1ms"),
        *("0mbit", "-5mbit", "+5mbit", "nanmbit", "infgbit", "7kbit", "33gbit", "9" * 400 + "gbit", "10MB/s", "10MBps"),
    ],
)
def test_bad_rates(text: str) -> None:
    with pytest.raises(BadInput, match="expected 8kbit to 32gbit") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (8_000, "8 kbit/s"),
        (999_000, "999 kbit/s"),
        (1_000_000, "1 Mbit/s"),
        (100_000_000, "100 Mbit/s"),
        (2_500_000_000, "2.5 Gbit/s"),
    ],
)
def test_a_rate_reads_well(bits: int, text: str) -> None:
    assert str(Rate(bits)) == text
    assert parse_rate(text) == Rate(bits)


def test_nothing_is_counted_outside_workers() -> None:
    assert interface_bytes() is None
