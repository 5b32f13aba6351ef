"""Tests which addresses the metrics may be served at, and what is said of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.daemon.http_address import EXPECTED, HttpAddress, parse_http_address
from tests.support.cases import each_case


@each_case(
    ("text", "address"),
    [
        ("127.0.0.1:9419", HttpAddress("127.0.0.1", 9419)),
        ("localhost:0", HttpAddress("127.0.0.1", 0)),
        ("LOCALHOST:1", HttpAddress("127.0.0.1", 1)),
        ("[::1]:65535", HttpAddress("::1", 65535)),
        ("unix:/run/x/m.sock", HttpAddress(path=Path("/run/x/m.sock"))),
        ("unix:m.sock", HttpAddress(path=Path.cwd() / "m.sock")),
    ],
)
def test_addresses_of_this_machine(text: str, address: HttpAddress) -> None:
    assert parse_http_address(text) == address


@pytest.mark.parametrize("text", ["127.0.0.1:9419", "[::1]:1", "unix:/run/m"])
def test_an_address_reads_as_it_was_written(text: str) -> None:
    assert str(parse_http_address(text)) == text


@each_case(
    "text", ["", "9419", ":9419", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:x",
             "::1:9419", "127.0.0.1:٣", "http://127.0.0.1:9419"],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_http_address(text)
    assert str(caught.value) == f"http is {text!r}; expected {EXPECTED}"


@each_case("host", ["0.0.0.0", "[::]", "10.0.0.7", "node-3", "127.0.0.1.evil.org"])
def test_other_machines_may_not_read(host: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_http_address(f"{host}:9419")
    assert str(caught.value).startswith(f"http is '{host}:9419'; expected {EXPECTED}, because only")
    assert "metrics_file" in str(caught.value)


@pytest.mark.parametrize("text", ["unix:", f"unix:/{'x' * 107}"])
def test_a_socket_needs_a_path_that_the_kernel_takes(text: str) -> None:
    with pytest.raises(ValueError, match="expected unix: and the path of a socket, of at most 107"):
        parse_http_address(text)


@each_case(
    ("text", "shown", "local"),
    [
        ("0.0.0.0:80", "0.0.0.0:80", False), ("[::]:80", "[::]:80", False),
        ("10.1.2.3:0", "10.1.2.3:0", False), ("localhost:80", "127.0.0.1:80", True),
        ("[::1]:80", "[::1]:80", True), ("unix:/run/p", "unix:/run/p", True),
    ],
)  # fmt: skip
def test_the_page_may_have_any_ip_address(text: str, shown: str, local: bool) -> None:
    address = parse_http_address(text, remote=True)
    assert (str(address), address.is_local) == (shown, local)


@each_case("host", ["node-3", "127.0.0.1.evil.org", "0.0.0", "[0.0.0.0", "::"])
def test_a_name_is_no_ip_address(host: str) -> None:
    with pytest.raises(ValueError, match="http is .*; expected "):
        parse_http_address(f"{host}:9419", remote=True)
