"""Boards for ranks that are threads of one process: what one posts, all can read."""

import json
import threading
import time


class SharedBoard:
    """The notices of all ranks. Values go through JSON, as on the run's own board."""

    def __init__(self):
        self.notices = {}
        self.read_by = {}
        self._changed = threading.Condition()

    def of(self, rank):
        return BoardOfRank(self, rank)

    def run(self, ranks, do):
        """Call ``do`` for each rank at once; return what each returned, or raised."""
        found = {}

        def one(rank):
            try:
                found[rank] = do(rank)
            except Exception as error:  # the test looks at it
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(found) == sorted(ranks), "a rank has not come back"
        return found


class BoardOfRank:
    def __init__(self, shared, rank):
        self._shared, self._rank = shared, rank

    def post(self, name, value):
        with self._shared._changed:
            assert (name, self._rank) not in self._shared.notices, "once under each name"
            self._shared.notices[name, self._rank] = json.dumps(value)
            self._shared._changed.notify_all()

    def read(self, name, ranks, *, within_seconds):
        until = time.monotonic() + within_seconds
        keys = {rank: (name, rank) for rank in ranks}
        with self._shared._changed:
            self._shared.read_by[self._rank] = self._shared.read_by.get(self._rank, 0) + len(keys)
            while not all(key in self._shared.notices for key in keys.values()):
                left = until - time.monotonic()
                if left <= 0 or not self._shared._changed.wait(left):
                    break
            notices = self._shared.notices
            return {rank: json.loads(notices[key]) for rank, key in keys.items() if key in notices}
