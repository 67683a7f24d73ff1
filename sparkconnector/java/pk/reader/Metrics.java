// What a scan says about the way that its rows took: in Spark's SQL tab, in `executedPlan.metrics`, and
// in the progress of a stream.
//
// Each task counts for itself.  Spark adds the counts of a query's tasks by the classes below, and creates
// those by name, so they are public and their constructors take nothing.
//
// Local invariant
//   M1  Of a task that failed, Spark adds nothing to a stream's totals.
package pk.reader;

import java.io.Serializable;
import java.util.Arrays;
import java.util.Map;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomSumMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.util.LongAccumulator;

public final class Metrics {
  private final long[] counts = new long[Count.values().length];

  /** What is counted: its name in a plan's metrics and in a progress, and its words in the SQL tab. */
  enum Count {
    COLUMNAR("pkRowsInColumns", "rowsInColumns", "rows read in columns"),
    PYTHON("pkRowsThroughPython", "rowsThroughPython", "rows read through Python"),
    HANDED("pkRangesHandedToPython", "rangesHandedToPython",
        "ranges that Python read on after the JVM stopped"),
    LOG_ROWS("pkRowsFromLog", "rowsFromLog", "rows read in columns from the log"),
    LOG_BYTES("pkBytesFromLog", "bytesFromLog", "bytes received of the log"),
    TABLE_ROWS("pkRowsFromTable", "rowsFromTable", "rows read in columns from the table"),
    TABLE_BYTES("pkBytesFromTable", "bytesFromTable", "bytes of the table's files to read");

    final String metric;
    final String inProgress;
    final String words;

    Count(String metric, String inProgress, String words) {
      this.metric = metric;
      this.inProgress = inProgress;
      this.words = words;
    }
  }

  private abstract static class Sum extends CustomSumMetric {
    private final Count count;

    Sum(Count count) {
      this.count = count;
    }

    @Override
    public String name() {
      return count.metric;
    }

    @Override
    public String description() {
      return count.words;
    }
  }

  public static final class RowsInColumns extends Sum {
    public RowsInColumns() {
      super(Count.COLUMNAR);
    }
  }

  public static final class RowsThroughPython extends Sum {
    public RowsThroughPython() {
      super(Count.PYTHON);
    }
  }

  public static final class RangesHandedToPython extends Sum {
    public RangesHandedToPython() {
      super(Count.HANDED);
    }
  }

  public static final class RowsFromLog extends Sum {
    public RowsFromLog() {
      super(Count.LOG_ROWS);
    }
  }

  public static final class BytesFromLog extends Sum {
    public BytesFromLog() {
      super(Count.LOG_BYTES);
    }
  }

  public static final class RowsFromTable extends Sum {
    public RowsFromTable() {
      super(Count.TABLE_ROWS);
    }
  }

  public static final class BytesFromTable extends Sum {
    public BytesFromTable() {
      super(Count.TABLE_BYTES);
    }
  }

  static CustomMetric[] with(CustomMetric[] others) {
    CustomMetric[] ours = {
      new RowsInColumns(), new RowsThroughPython(), new RangesHandedToPython(),
      new RowsFromLog(), new BytesFromLog(), new RowsFromTable(), new BytesFromTable()
    };
    return joined(others, ours);
  }

  /** Returns both arrays as one, of the type of ours. */
  @SuppressWarnings("unchecked")
  static <T> T[] joined(T[] first, T[] ours) {
    T[] found =
        Arrays.copyOf(first, first.length + ours.length, (Class<? extends T[]>) ours.getClass());
    System.arraycopy(ours, 0, found, first.length, ours.length);
    return found;
  }

  void add(Count count, long number) {
    counts[count.ordinal()] += number;
  }

  CustomTaskMetric[] values() {
    CustomTaskMetric[] found = new CustomTaskMetric[counts.length];
    for (Count each : Count.values()) {
      found[each.ordinal()] = new Value(each.metric, counts[each.ordinal()]);
    }
    return found;
  }

  /** One number of a task or of the driver. */
  static final class Value implements CustomTaskMetric {
    private final String name;
    private final long value;

    Value(String name, long value) {
      this.name = name;
      this.value = value;
    }

    @Override
    public String name() {
      return name;
    }

    @Override
    public long value() {
      return value;
    }
  }

  /** The counts of all tasks of a stream, which executors add to when a task ends (M1). */
  static final class Totals implements Serializable {
    private static final long serialVersionUID = 1L;

    private final LongAccumulator[] sums = new LongAccumulator[Count.values().length];
    private transient long[] before = new long[sums.length];

    Totals(SparkContext context) {
      for (int at = 0; at < sums.length; at++) {
        sums[at] = context.longAccumulator();
      }
    }

    void add(Metrics task) {
      for (int at = 0; at < sums.length; at++) {
        sums[at].add(task.counts[at]);
      }
    }

    /** Puts what was counted since the last call; on the driver. */
    void since(Map<String, String> into) {
      for (Count each : Count.values()) {
        long now = sums[each.ordinal()].value();
        into.put(each.inProgress, Long.toString(now - before[each.ordinal()]));
        before[each.ordinal()] = now;
      }
    }
  }
}
