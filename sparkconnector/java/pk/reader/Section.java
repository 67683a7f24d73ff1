// What reads one section of a plan in columns.
package pk.reader;

import java.io.Closeable;
import java.io.IOException;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** Reads one range of one partition.  Any exception hands the rest over to Python. */
interface Section extends Closeable {
  /** Returns the next rows, in offset order; null at the end of the range. */
  ColumnarBatch next() throws IOException;

  /** Returns the offset below which everything was returned by `next`. */
  long position();

  /** Returns how many bytes of the log were received, or of the table's files chosen, so far. */
  long bytes();
}
