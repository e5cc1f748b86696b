"""How a metric is named and shown, and where files hold it."""

import pytest

from flower_blsgd.results.metric import ACCURACY, Metric, value_in

RMSE = Metric("rmse", "min", "validation")


def test_values_of_an_accuracy_and_of_an_error() -> None:
    assert ACCURACY.named(0.98333) == ACCURACY.measured(0.98333) == "accuracy 98.33%"
    assert RMSE.named(1234.5) == "rmse 1234"
    assert RMSE.measured(0.5) == "validation rmse 0.5"
    assert (ACCURACY.best([0.5, 0.75, 0.75]), RMSE.best([0.5, 0.25, 0.25])) == (1, 1)
    assert ACCURACY.measured(None) == RMSE.named(None) == ""


@pytest.mark.parametrize(("metric", "value"), [(ACCURACY, 0.25), (RMSE, 0.0), (RMSE, None)])
def test_files_have_a_column_for_accuracies_and_one_for_others(
    metric: Metric, value: float | None
) -> None:
    columns = metric.columns(value, "best_")
    assert list(columns) == ["best_accuracy", "best_metric"]
    assert columns["best_accuracy" if metric is ACCURACY else "best_metric"] == value
    assert value_in(columns, "best_") == value
    assert Metric.of(metric.description, 0.1 * (metric is RMSE)) == metric
