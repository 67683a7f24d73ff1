// The columns that a query asked for: those with one value for the whole section, and which of the
// others are never null.
package pk.reader;

import java.io.IOException;
import java.util.Locale;
import org.apache.spark.sql.execution.vectorized.ConstantColumnVector;
import org.apache.spark.sql.types.Metadata;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.unsafe.types.UTF8String;

final class Columns {
  private final UTF8String topic;
  private final int partition;
  private final StructField[] fields;
  private final String[] names;

  Columns(String topic, int partition, StructType required) {
    this.topic = UTF8String.fromString(topic);
    this.partition = partition;
    fields = required.fields();
    names = new String[fields.length];
    for (int at = 0; at < fields.length; at++) {
      names[at] = fields[at].name().toLowerCase(Locale.ROOT);
    }
  }

  int size() {
    return fields.length;
  }

  /** Returns the name of a column in lower case; the query may spell it otherwise. */
  String name(int at) {
    return names[at];
  }

  /** Returns the column `topic` or `partition`. */
  ColumnVector constant(int at, int rows) {
    ConstantColumnVector found = new ConstantColumnVector(rows, fields[at].dataType());
    if (names[at].equals("topic")) {
      found.setUtf8String(topic);
    } else {
      found.setInt(partition);
    }
    return found;
  }

  /** Refuses a null where the topic's columns never have one. */
  void check(int at, ColumnVector column) throws IOException {
    switch (names[at]) {
      case "key":
      case "value":
      case "headers":
        return;
      default:
        if (column.hasNull()) {
          throw new IOException("a row has no " + fields[at].name());
        }
    }
  }

  Metadata noMetadata() {
    return Metadata.empty();
  }
}
