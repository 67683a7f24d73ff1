// What a scan says in Spark's SQL tab and in `executedPlan.metrics` about the way that its rows took.
//
// Spark creates the classes of the metrics by name to add up the tasks' values, so they are public and
// their constructors take nothing.
package pk.reader;

import java.util.Arrays;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomSumMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;

public final class Metrics {
  private static final String COLUMNAR = "pkRowsInColumns";
  private static final String PYTHON = "pkRowsThroughPython";
  private static final String HANDED = "pkRangesHandedToPython";

  private long columnar;
  private long python;
  private long handed;

  public static final class RowsInColumns extends CustomSumMetric {
    @Override
    public String name() {
      return COLUMNAR;
    }

    @Override
    public String description() {
      return "rows read in columns";
    }
  }

  public static final class RowsThroughPython extends CustomSumMetric {
    @Override
    public String name() {
      return PYTHON;
    }

    @Override
    public String description() {
      return "rows of a columnar scan read through Python";
    }
  }

  public static final class RangesHandedToPython extends CustomSumMetric {
    @Override
    public String name() {
      return HANDED;
    }

    @Override
    public String description() {
      return "ranges that Python read on after the JVM stopped";
    }
  }

  static CustomMetric[] with(CustomMetric[] others) {
    CustomMetric[] found = Arrays.copyOf(others, others.length + 3);
    found[others.length] = new RowsInColumns();
    found[others.length + 1] = new RowsThroughPython();
    found[others.length + 2] = new RangesHandedToPython();
    return found;
  }

  void returned(int rows, boolean throughPython) {
    if (throughPython) {
      python += rows;
    } else {
      columnar += rows;
    }
  }

  void handedOver() {
    handed++;
  }

  CustomTaskMetric[] values() {
    return new CustomTaskMetric[] {
      value(COLUMNAR, columnar), value(PYTHON, python), value(HANDED, handed)
    };
  }

  private static CustomTaskMetric value(String name, long value) {
    return new CustomTaskMetric() {
      @Override
      public String name() {
        return name;
      }

      @Override
      public long value() {
        return value;
      }
    };
  }
}
