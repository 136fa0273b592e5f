"""How ranks that somebody else started come together: with a word about whom they wait for.

There is no supervisor over them. A wait in torch's own store, or in the set-up of a group, would
say nothing and listen to nobody until its timeout; so each rank looks from time to time instead.
"""

from __future__ import annotations

import socket
import time

from distribute import notice
from distribute.environment import External
from distribute.errors import JoinTimeout
from distribute.rendezvous import Rendezvous

# Waiting gets a line on stderr after this, in seconds.
_NOTICE_SECONDS = 8.0
_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.1


class Meeting:
    """The waiting of one rank for the others.

    Args:
        external: The world.
        timeout: Seconds until all have come.
    """

    def __init__(self, external: External, timeout: float) -> None:
        self._external = external
        self._timeout = timeout
        self._began = time.monotonic()
        self._pause = _SHORTEST_PAUSE
        self._noticed = False

    def find_store(self) -> None:
        """Returns when somebody listens where the store is to be.

        Raises:
            JoinTimeout: Nobody did in time.
        """
        address = self._external.master_addr, self._external.master_port
        while True:
            try:
                socket.create_connection(address, timeout=2.0).close()
            except OSError as error:
                reason = error.strerror or error
                self._go_on(f"rank 0 has not come, for nobody listens at its address ({reason})")
            else:
                return

    def wait_for_all(self, rendezvous: Rendezvous, key: str) -> None:
        """Returns when all ranks have come.

        Args:
            rendezvous: The store.
            key: Name of the call.

        Raises:
            JoinTimeout: Some did not in time.
        """
        external = self._external
        rendezvous.announce(key, external.rank)
        while missing := rendezvous.missing(key, external.world_size):
            self._go_on(f"rank(s) {', '.join(map(str, missing))} have not come")

    def _go_on(self, fact: str) -> None:
        """Waits a moment; says what for, or gives up, when it is time to."""
        external = self._external
        waited = time.monotonic() - self._began
        told = (
            f"{fact}; RANK={external.rank} WORLD_SIZE={external.world_size} "
            f"MASTER_ADDR={external.master_addr} MASTER_PORT={external.master_port} in the "
            f"environment say that this process is one of {external.world_size}"
        )
        advice = "start the others, or unset these variables if they are left over"
        if waited >= self._timeout:
            raise JoinTimeout(
                f"the ranks did not join within {self._timeout:g} s (rendezvous_timeout): {told}; "
                f"{advice}"
            )
        if waited >= _NOTICE_SECONDS and not self._noticed:
            self._noticed = True
            notice.tell(f"distribute: waiting since {waited:.0f} s: {told}; {advice}\n")
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
