// Reads hot sections for tests/spark/test_columnar_broker.py, without Spark around it.
//
// stdin: a plan on each line.  stdout: for its first section one line: `end` or `failed`, the position, and
// the offsets of the rows that were returned; for a plan that the jar does not follow, `refused` and why.
package pk.reader;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

public final class HotPeer {
  private static final StructType COLUMNS =
      new StructType(new StructField[] {
        DataTypes.createStructField("offset", DataTypes.LongType, false),
        DataTypes.createStructField("value", DataTypes.BinaryType, true)
      });

  public static void main(String[] arguments) throws IOException {
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
    for (String line = in.readLine(); line != null; line = in.readLine()) {
      String problem = Plan.problem(line);
      if (!problem.isEmpty()) {
        System.out.println("refused " + problem);
        System.out.flush();
        continue;
      }
      Plan.Section section = Plan.parse(line).sections.get(0);
      StringBuilder offsets = new StringBuilder();
      long position = section.start;
      String how = "end";
      try (HotSection one = new HotSection(section, COLUMNS)) {
        try {
          for (ColumnarBatch rows = one.next(); rows != null; rows = one.next()) {
            for (int row = 0; row < rows.numRows(); row++) {
              offsets.append(' ').append(rows.column(0).getLong(row));
            }
          }
        } catch (IOException | RuntimeException cause) {
          how = "failed";
        }
        position = one.position();
      } catch (IOException | RuntimeException cause) {
        how = "failed"; // before the first reply
      }
      System.out.println(how + " " + position + offsets);
      System.out.flush();
    }
  }

  private HotPeer() {}
}
