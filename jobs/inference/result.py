"""What an inference job returns to Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from json import loads
from typing import Any

from raytrain.errors import RunError
from raytrain.infer.output import FORMATS, MANIFEST
from raytrain.runs.storage import join, locate, open_store


@dataclass(frozen=True)
class InferResult:
    """What an inference job left.

    Attributes:
        status: "done", or "failed" if more rows failed than `infer.max_failures` allows.
        output: the folder.
        rows, failed: rows of the input, and those without a prediction.
        summary: the figures of summary.json.

    Example:
        >>> from jobs.infer import infer
        >>> answers = infer("runs/latest", input="rows.csv", quiet=True)
        >>> answers.status, answers.rows, answers.failed
        ('done', 60, 0)
        >>> answers.predictions == f"{answers.output}/predictions.parquet"
        True
        >>> answers.table().num_rows, sum(batch.num_rows for batch in answers.batches())
        (60, 60)

        As a Ray Dataset, in a program that has called `ray.init`:

        >>> answers.dataset().count()
        60
    """

    status: str
    output: str
    rows: int
    failed: int
    summary: dict[str, Any]

    @property
    def predictions(self) -> str:
        """Path or URI of the file with the predictions.

        Raises:
            RunError: there is none, because the job failed.
        """
        store = open_store(self.output)
        for kind in FORMATS:
            if store.exists(f"predictions.{kind}"):
                return join(self.output, f"predictions.{kind}")
        raise RunError(f"{self.output} holds no predictions")

    def table(self) -> Any:
        """The predictions as an Arrow table, in input order."""
        import pyarrow as pa

        return pa.Table.from_batches(self.batches())

    def batches(self) -> Iterator[Any]:
        """The predictions as Arrow record batches, in input order; one is in memory at a time."""
        from pyarrow import csv, json, parquet

        filesystem, inner = locate(self.predictions, key="infer.output")
        if inner.endswith(".parquet"):
            yield from parquet.ParquetFile(filesystem.open_input_file(inner)).iter_batches()
        elif inner.endswith(".csv"):
            yield from csv.open_csv(filesystem.open_input_stream(inner), **self._reading("csv"))
        else:
            yield from json.read_json(filesystem.open_input_stream(inner), **self._reading("jsonl")).to_batches()

    def dataset(self) -> Any:
        """The predictions as a Ray Dataset, which reads them where it is used."""
        import ray

        filesystem, inner = locate(self.predictions, key="infer.output")
        readers = {"parquet": ray.data.read_parquet, "csv": ray.data.read_csv, "jsonl": ray.data.read_json}
        kind = inner.rpartition(".")[2]
        return readers[kind](inner, filesystem=filesystem, **self._reading(kind))

    def _reading(self, kind: str) -> dict[str, Any]:
        """Options of Arrow's reader with which texts stay texts: ids such as `007` and dates would become others."""
        import pyarrow as pa
        from pyarrow import csv, json

        about = loads(open_store(self.output).read_bytes(MANIFEST))
        texts = dict.fromkeys(about.get("text_columns", ()), pa.string())
        if not texts or kind == "parquet":
            return {}
        if kind == "jsonl":
            return {"parse_options": json.ParseOptions(explicit_schema=pa.schema(list(texts.items())))}
        convert = csv.ConvertOptions(
            column_types=texts, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        )
        return {"parse_options": csv.ParseOptions(newlines_in_values=True), "convert_options": convert}
