"""The payload connection: RESP in any pieces, TCP and TLS, an ACL; a peer that is slow, gone or talks rubbish."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis, exceptions

from pipeline.broker.connect import connect, translate
from pipeline.broker.payload import Link, command, store
from pipeline.errors import BrokerError, FrameError
from tests.ports import free_port


class Peer:
    """A server that says what the test tells it to. It answers redis-py's handshake by itself."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.client = connect(f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0?protocol=2")
        self._made = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        """After the handshake nothing is read."""
        with contextlib.suppress(OSError):
            self._one, _ = self._listener.accept()
            while not (data := self._one.recv(4096)).startswith(b"hello"):
                self._one.sendall(b"+PONG\r\n" if b"PING" in data else b"+OK\r\n")
            self._made.set()
            self._closed.wait()

    def say(self, data: bytes) -> None:
        assert self._made.wait(60)
        self._one.sendall(data)

    def hang_up(self) -> None:
        assert self._made.wait(60)
        self._one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        if self._made.is_set():
            self._one.close()
        self.client.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with contextlib.closing(Peer()) as peer:
        yield peer


@pytest.fixture
def link(peer: Peer) -> Iterator[Link]:
    with contextlib.closing(Link(peer.client, lambda: None, patience_s=0.3)) as link:
        link.send([b"hello"], 0)
        yield link


REPLIES = [
    (b"+OK\r\n", "OK"),
    (b":-7\r\n", -7),
    (b"$3\r\nabc\r\n", b"abc"),
    (b"$0\r\n\r\n", b""),
    (b"$-1\r\n", None),
    (b"_\r\n", None),
    (b"*-1\r\n", None),
    (b"*0\r\n", []),
    (b"*3\r\n:1\r\n$2\r\n\r\n\r\n*1\r\n+x\r\n", [1, b"\r\n", ["x"]]),
    (b"%1\r\n$1\r\ns\r\n*0\r\n", [[b"s", []]]),
    (b"$5000\r\n" + b"x" * 5000 + b"\r\n", b"x" * 5000),
]


@pytest.mark.parametrize(("data", "value"), REPLIES)
@pytest.mark.parametrize("piecewise", [False, True])
def test_replies_in_any_pieces(peer: Peer, link: Link, data: bytes, value: Any, piecewise: bool) -> None:
    link.send([b"x"], 2)
    speech = data + b"+next\r\n"

    def speak() -> None:
        for at in range(len(speech)):
            peer.say(speech[at : at + 1])

    if piecewise:
        threading.Thread(target=speak, daemon=True).start()
    else:
        peer.say(speech)
    assert link.reply() == value
    assert link.reply() == "next"
    assert link.due == 0


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", exceptions.OutOfMemoryError),
        ("NOSCRIPT No matching script.", exceptions.NoScriptError),
        ("NOPERM no access", exceptions.NoPermissionError),
        ("NOAUTH Authentication required.", exceptions.AuthenticationError),
        ("READONLY You can't write against a read only replica.", exceptions.ReadOnlyError),
        ("LOADING the dataset", exceptions.BusyLoadingError),
        ("ERR whatever", exceptions.ResponseError),
    ],
)
def test_a_refusal_is_a_value_and_the_next_reply_follows(
    peer: Peer, link: Link, text: str, kind: type[Exception]
) -> None:
    link.send([b"x"], 3)
    peer.say(f"-{text}\r\n-{text}\r\n:5\r\n".encode())
    for got in (link.reply(), link.reply_into(memoryview(bytearray(4)))):
        assert type(got) is kind
        assert str(got) == text
    assert link.reply() == 5


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 100_000])
def test_a_payload_lands_in_the_buffer(peer: Peer, link: Link, size: int) -> None:
    payload = bytes(range(256)) * 391
    target = memoryview(bytearray(100_000))
    link.send([b"x"], 2)
    threading.Thread(target=peer.say, args=(b"$%d\r\n%b\r\n:3\r\n" % (size, payload[:size]),), daemon=True).start()
    got = link.reply_into(target)
    assert isinstance(got, memoryview)
    assert got == payload[:size]
    assert got.obj is target.obj
    assert target[size:] == bytes(100_000 - size)
    assert link.reply() == 3


@pytest.mark.parametrize("nothing", [b"$-1\r\n", b"_\r\n"])
def test_a_payload_that_is_gone_is_empty(peer: Peer, link: Link, nothing: bytes) -> None:
    link.send([b"x"], 2)
    peer.say(nothing + b":3\r\n")
    got = link.reply_into(memoryview(bytearray(4)))
    assert isinstance(got, memoryview)
    assert not got
    assert link.reply() == 3


@pytest.mark.parametrize(
    ("speech", "error", "says"),
    [
        (b":1\r\n", exceptions.ConnectionError, "a payload was asked for, b':1' came"),
        (b"$5\r\nabcde\r\n", FrameError, "wrong size of payload: expected at most 4, got 5"),
        (b"$99999999999\r\n", FrameError, "wrong size of payload: expected at most 4, got 99999999999"),
    ],
)
def test_more_than_was_asked_for_ends_the_connection(
    peer: Peer, link: Link, speech: bytes, error: type[Exception], says: str
) -> None:
    link.send([b"x"], 2)
    peer.say(speech)
    target = memoryview(bytearray(4))
    with pytest.raises(error, match=f"^{re.escape(says)}$"):
        link.reply_into(target)
    assert bytes(target) == bytes(4)
    assert link.due == 0


@pytest.mark.parametrize("speech", [b"x" * 5000, b"?what\r\n"])
def test_rubbish_ends_the_connection(peer: Peer, link: Link, speech: bytes) -> None:
    link.send([b"x"], 1)
    peer.say(speech)
    with pytest.raises(exceptions.ConnectionError):
        link.reply()


def test_a_silent_peer_is_a_timeout(peer: Peer, link: Link) -> None:
    link.send([b"x"], 1)
    peer.say(b"$4\r\nab")
    with pytest.raises(BrokerError, match="did not answer in time"), translate():
        link.reply()


def test_a_peer_that_hangs_up_is_a_broken_connection(peer: Peer, link: Link) -> None:
    link.send([b"x"], 1)
    peer.hang_up()
    with pytest.raises(BrokerError, match="unreachable"), translate():
        link.reply()


@pytest.mark.parametrize("side", ["send", "reply"])
def test_check_ends_a_wait(peer: Peer, side: str) -> None:
    """Sending stops where nobody reads; receiving where nobody writes."""
    stop = KeyError("enough")

    def check() -> None:
        raise stop

    with contextlib.closing(Link(peer.client, check, patience_s=60)) as link:
        link.send([b"hello"], 1)
        with pytest.raises(KeyError) as caught:
            link.reply() if side == "reply" else link.send([bytes(1 << 26)], 0)
    assert caught.value is stop


def test_a_connection_with_replies_to_come_is_not_used_again(redis_client: Redis, server_url: str) -> None:
    with connect(server_url) as client:
        link = Link(client, lambda: None)
        link.send([command("SET", "k", b"mine")], 1)
        link.close()
        assert client.get("other") is None
        again = Link(client, lambda: None)
        again.send([command("GET", "k")], 1)
        assert again.reply() == b"mine"
        again.close()
        assert client.connection_pool._available_connections[0].is_connected  # read to the end: kept
        assert client.get("k") == b"mine"


@pytest.mark.parametrize("protocol", [2, 3])
def test_both_protocols_and_a_payload_from_a_view(redis_client: Redis, server_url: str, protocol: int) -> None:
    page = bytearray(range(256)) * 4000
    with connect(f"{server_url}?protocol={protocol}") as client, contextlib.closing(Link(client, lambda: None)) as link:
        link.send([*store("page", memoryview(page), 60_000), command("GET", "page")], 2)
        assert link.reply() == "OK"
        got = link.reply_into(memoryview(bytearray(len(page))))
        assert isinstance(got, memoryview)
        assert bytes(got) == page
        link.send([command("XADD", "s", "1-1", "h", b"\r\n\0"), command("XREAD", "STREAMS", "s", "0")], 2)
        assert link.reply() == b"1-1"
        assert link.reply() == [[b"s", [[b"1-1", [b"h", b"\r\n\0"]]]]]
    assert 0 < redis_client.pttl("page") <= 60_000


def test_a_user_of_an_acl(redis_client: Redis, server_url: str) -> None:
    redis_client.acl_setuser("pages", enabled=True, passwords=["+secret"], keys=["cf:*"], commands=["+set", "+client"])
    try:
        with connect(server_url.replace("//", "//pages:secret@")) as client:
            link = Link(client, lambda: None)
            link.send([command("SET", "cf:a", "1"), command("SET", "b", "1"), command("GET", "cf:a")], 3)
            first, *refused = [link.reply() for _ in range(3)]
            link.close()
            assert first == "OK"
            assert [type(one) for one in refused] == [exceptions.NoPermissionError] * 2
        client = connect(server_url.replace("//", "//pages:wrong@"))
        with client, pytest.raises(BrokerError, match="refused our credentials"), translate():
            Link(client, lambda: None).send([b""], 0)
    finally:
        redis_client.acl_deluser("pages")


@pytest.fixture(scope="module")
def tls_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """redis-server that speaks TLS only, with a certificate made for it."""
    if not (openssl := shutil.which("openssl")) or not (binary := shutil.which("redis-server")):
        pytest.skip("openssl or redis-server is not on PATH")
    directory: Path = tmp_path_factory.mktemp("tls")
    key, certificate, port = directory / "key.pem", directory / "cert.pem", free_port()
    made = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*made, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    options = ["--port", "0", "--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    options += ["--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no", "--save", "", "--bind", "127.0.0.1"]
    server = subprocess.Popen([binary, *options, "--dir", str(directory)], stdout=subprocess.DEVNULL)
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
    try:
        with connect(url) as client:
            _await(client, server)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _await(client: Redis, server: subprocess.Popen[bytes]) -> None:
    for _ in range(1000):
        assert server.poll() is None, "this redis-server has no TLS"
        with contextlib.suppress(exceptions.ConnectionError):
            client.ping()
            return
        time.sleep(0.02)
    raise AssertionError("the server did not answer")


def test_over_tls(tls_url: str) -> None:
    page = bytes(range(256)) * 8000
    with connect(tls_url) as client, contextlib.closing(Link(client, lambda: None)) as link:
        for _ in range(2):
            link.send([*store("page", page, 60_000), command("GET", "page")], 2)
            assert link.reply() == "OK"
            got = link.reply_into(memoryview(bytearray(len(page))))
            assert isinstance(got, memoryview)
            assert bytes(got) == page
    stranger = connect(tls_url.split("?", maxsplit=1)[0])  # nobody vouches for its certificate
    with stranger, pytest.raises(BrokerError, match="certificate verify failed"), translate():
        Link(stranger, lambda: None).send([b""], 0)
