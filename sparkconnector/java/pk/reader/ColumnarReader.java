// Reads one planned partition: its sections, one after the other.
//
// A section that fails, in whatever way, ends there: Python reads the section's rest from its position.
// Python then retries, looks up metadata, reports losses and words errors; Java does none of these.
//
// Local invariant
//   R1  Everything below `position` was returned once, in order.  The batch that Spark processes now is
//       below it: a reader goes on only after Spark asked for the next one.
package pk.reader;

import java.io.IOException;
import org.apache.spark.TaskContext;
import org.apache.spark.TaskKilledException;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

final class ColumnarReader implements PartitionReader<ColumnarBatch> {
  private static final Logger LOG = LoggerFactory.getLogger(ColumnarReader.class);

  private final PlannedPartition partition;
  private final ColumnarReaderFactory factory;
  private final StructType required;
  private final Plan plan;
  private final Metrics metrics = new Metrics();
  private int next;
  private Section current;
  private boolean throughPython;
  private ColumnarBatch batch;
  private long counted; // bytes of the current section in the metrics
  private boolean closed;

  ColumnarReader(
      PlannedPartition partition, ColumnarReaderFactory factory, StructType required) {
    this.partition = partition;
    this.factory = factory;
    this.required = required;
    plan = Plan.parse(partition.json);
  }

  @Override
  public boolean next() throws IOException {
    while (true) {
      if (current == null) {
        if (next == plan.sections.size()) {
          return false;
        }
        begin();
      }
      batch = advance();
      if (batch != null) {
        count(batch.numRows());
        return true;
      }
      countBytes();
      current.close();
      current = null;
      next++;
    }
  }

  private void count(int rows) {
    if (throughPython) {
      metrics.add(Metrics.Count.PYTHON, rows);
      return;
    }
    metrics.add(Metrics.Count.COLUMNAR, rows);
    metrics.add(isHot() ? Metrics.Count.LOG_ROWS : Metrics.Count.TABLE_ROWS, rows);
  }

  /** Counts the bytes of the current section that were not counted yet. */
  private void countBytes() {
    if (current != null && !throughPython) {
      long now = current.bytes();
      metrics.add(isHot() ? Metrics.Count.LOG_BYTES : Metrics.Count.TABLE_BYTES, now - counted);
      counted = now;
    }
  }

  private boolean isHot() {
    return plan.sections.get(next).kind.equals("hot");
  }

  /** Opens the next section. */
  private void begin() {
    Plan.Section one = plan.sections.get(next);
    throughPython = one.kind.equals("python");
    counted = 0;
    if (throughPython) {
      current = python(one.start);
    } else {
      try {
        current = open(one);
      } catch (Exception | LinkageError cause) {
        handOver(one, one.start, cause);
      }
    }
  }

  private Section open(Plan.Section one) throws IOException {
    if (one.kind.equals("cold")) {
      return new ColdSection(one, required);
    }
    if (one.kind.equals("hot")) {
      return new HotSection(one, required);
    }
    throw new IOException("no reader of " + one.kind + " sections");
  }

  private ColumnarBatch advance() throws IOException {
    try {
      return current.next();
    } catch (TaskKilledException cause) {
      throw cause;
    } catch (Exception | LinkageError cause) {
      TaskContext context = TaskContext.get();
      if (throughPython || (context != null && context.isInterrupted())) {
        throw cause;
      }
      long position = current.position();
      countBytes();
      closeQuietly(current);
      handOver(plan.sections.get(next), position, cause);
      return current.next();
    }
  }

  private void handOver(Plan.Section one, long position, Throwable cause) {
    LOG.info("{}-{}: Python reads from offset {} on: {}",
        one.topic, one.partition, position, cause.toString());
    metrics.add(Metrics.Count.HANDED, 1);
    throughPython = true;
    current = python(position);
  }

  /** Python reads the section from `position` on. */
  private Section python(long position) {
    return new PythonSection(
        factory.pythonRows(partition.python(next, next + 1, position)), required);
  }

  @Override
  public ColumnarBatch get() {
    return batch;
  }

  @Override
  public CustomTaskMetric[] currentMetricsValues() {
    countBytes();
    return metrics.values();
  }

  @Override
  public void close() throws IOException {
    if (!closed) {
      closed = true;
      countBytes();
      factory.ended(metrics);
    }
    if (current != null) {
      current.close();
      current = null;
    }
  }

  private static void closeQuietly(Section one) {
    try {
      one.close();
    } catch (IOException | RuntimeException cause) {
      LOG.debug("closing a section that failed", cause);
    }
  }
}
