"""F: what runs out."""

from __future__ import annotations

import pytest
from redis import Redis

from pipeline.broker.connect import connect, translate
from pipeline.errors import BrokerError


def test_f71_no_connection_left_is_an_error_and_no_hang(server_url: str, redis_client: Redis) -> None:
    with connect(f"{server_url}?max_connections=1") as client, client.pubsub() as pubsub:
        pubsub.subscribe("the only connection")
        with pytest.raises(BrokerError, match="Too many connections"), translate():
            client.ping()
    with connect(f"{server_url}?max_connections=1") as client:
        assert client.ping()
